"""The Abstraction and Reasoning Challenge as input: tasks, augmentations, grids, prompts."""
