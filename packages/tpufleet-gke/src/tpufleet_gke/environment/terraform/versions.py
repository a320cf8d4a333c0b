"""Pinned versions of the programs and providers that the stages need."""

from __future__ import annotations

# Terraform 1.7 and OpenTofu 1.7 read the same configuration.
REQUIRED_VERSION = ">= 1.7.0"
# The schema that every generated resource is checked against is this version's.
GOOGLE_PROVIDER = "hashicorp/google"
GOOGLE_PROVIDER_VERSION = "6.50.0"
OPENTOFU_VERSION = "1.12.6"
