"""Components for fine-tuning, usable by hand or through the flows. Importing this package imports nothing heavy."""
