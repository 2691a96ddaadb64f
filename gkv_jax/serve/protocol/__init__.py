"""What clients may ask: the bodies of requests as types, and what their fields mean to the engine.

A field is served, or accepted because it changes nothing, or refused with the way out: none is ignored.
"""
