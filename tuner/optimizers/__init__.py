"""Ask-and-tell optimizers: one file each, one registry. No input, no output, no clock."""
