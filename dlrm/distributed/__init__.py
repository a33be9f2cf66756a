"""Tables and gradients over many processes."""
