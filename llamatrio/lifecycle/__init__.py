"""The provider proper: phases, queue, requests, and the actor that owns them."""
