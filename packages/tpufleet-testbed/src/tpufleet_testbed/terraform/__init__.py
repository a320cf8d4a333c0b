"""An emulated Google Cloud behind the plugin protocol of Terraform and OpenTofu."""
