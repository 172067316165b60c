"""Generated from proto/tandem/v1 by `make proto`; do not edit."""
