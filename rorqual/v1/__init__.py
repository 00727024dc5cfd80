"""Generated from protos/rorqual/v1 by `make protos`. Never edited."""
