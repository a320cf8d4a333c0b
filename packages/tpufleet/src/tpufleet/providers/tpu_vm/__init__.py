"""The provider `tpu-vm`: slices as TPU VMs, through Google's Cloud TPU client."""
