"""How a step sees earlier tokens: paged KV, windows, latents, selections, recurrent states; torch alone."""
