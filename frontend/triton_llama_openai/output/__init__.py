"""From the model's text to what a response has: reasoning, tool calls, log probabilities, events."""
