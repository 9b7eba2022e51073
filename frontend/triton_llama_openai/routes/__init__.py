"""One module a path of the API, with the inputs and outputs of its protocol."""
