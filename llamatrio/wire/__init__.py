"""PURE. What the bytes on the pipes and on the socket mean."""
