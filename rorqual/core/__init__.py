"""What all parts share and needs nothing but the standard library."""
