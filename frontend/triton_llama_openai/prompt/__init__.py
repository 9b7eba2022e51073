"""From a request's messages to the prompt's tokens. `message_chat` and `response_chat` make chats of other requests."""
