"""The requests as schemas: fields, types, bounds."""
