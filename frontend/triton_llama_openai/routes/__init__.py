"""One module a path of the API, with its response objects."""
