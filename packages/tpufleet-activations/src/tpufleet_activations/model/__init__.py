"""The decoder in JAX: configuration, weights, forward pass, device meshes."""
