"""Several rails as one transport: say what must arrive, and each slice takes the fastest way."""
