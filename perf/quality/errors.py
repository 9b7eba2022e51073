"""What a text can be refused for."""


class TextError(ValueError):
    """The text can't be read, or says too little. The message names the file, what was found and the bound."""
