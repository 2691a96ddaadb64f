"""A server under many clients, beside the engine alone; and what guided neighbours cost a stream."""
