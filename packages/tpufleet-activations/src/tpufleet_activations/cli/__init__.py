"""`tpu extract`: commands, and what they print."""
