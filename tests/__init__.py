"""Tests mirror the packages; `contract` holds what every store and every provider promises."""
