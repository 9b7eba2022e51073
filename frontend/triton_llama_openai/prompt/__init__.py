"""From a request's messages to the prompt's tokens."""
