"""How long a server takes from its start to being ready, from a checkpoint as it is and from a prepared one."""
