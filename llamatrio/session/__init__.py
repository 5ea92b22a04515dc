"""How a loaded model is spoken to, and what makes one."""
