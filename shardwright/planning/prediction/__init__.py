"""What a plan will take: a forward spread over a mesh, a schedule in time, bytes of each slot."""
