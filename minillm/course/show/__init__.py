"""How results look: text tables, pictures, widgets."""
