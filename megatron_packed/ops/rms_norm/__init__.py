"""RMS normalisation, with or without the residual connection, and layer normalisation."""
