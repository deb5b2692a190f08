"""A GPU that is none: two devices "fake:0" and "fake:1" on the CPU's memory (see backend.cpp)."""
