"""For people who come from the former extraction scripts: their options and formats, and ARC
prompts. `tpu extract` finds this package by the entry points of the distribution."""
