"""MaskBench: which JSON Schemas are enforced exactly, and what a mask costs."""
