"""The serving kernels: one definition each, a float64 reference, and the implementations that compute it."""
