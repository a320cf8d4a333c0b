"""From a plan to a dataset: planning, batching, workers, progress."""
