"""One model on several ranks: what each of them reads and holds, and how their partial results are added."""
