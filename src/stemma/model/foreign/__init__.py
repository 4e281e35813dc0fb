"""Models that run through the modules of transformers: the only room that touches their insides."""
