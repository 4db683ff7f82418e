"""Daguerre: one YAML recipe and one loop that trains, samples and evaluates diffusion models. Imports nothing."""

__version__ = "0.2.0.dev0"
