"""A module for each path of the API or a few; `*_input`, `*_output` and `chat_messages` convert for two of them."""
