"""Stable Diffusion's UNet, its ControlNets and its names in other programs, for the families sd and sdxl."""
