"""Compiles every kernel for accelerators that are not there, and tabulates what the compilers say."""
