"""What all backends speak: structures, arguments, precision, and the parts of attention that none of them owns."""
