"""What clients get: the bodies of answers as types, and how they are made from the engine's results."""
