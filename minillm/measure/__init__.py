"""What a server is judged by: metrics, workloads, limits of the hardware, and time that can be simulated."""
