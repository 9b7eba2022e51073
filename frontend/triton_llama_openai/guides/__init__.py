"""From a request's schema, regular expression, choices or grammar to the guide that constrains the model's text."""
