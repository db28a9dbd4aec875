"""`make chaos`: real processes under load while a seeded schedule breaks them, and what must hold all the same."""
