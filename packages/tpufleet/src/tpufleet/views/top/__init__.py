"""`tpu top`: jobs, slices, queue and events on one screen. Needs Textual, the extra `top`."""
