"""Result files to the paper's tables and figures; no model is loaded here and no torch is needed."""
