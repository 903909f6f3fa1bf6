"""The paper's model. Read in this order: positions, biases, contextual, processors, attention, transformer, loss."""
