"""What an agent may ask of a model, and the forms that answer it."""
