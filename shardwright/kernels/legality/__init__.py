"""What a lowered call must be: operands and attributes, by kind, and what it makes of them."""
