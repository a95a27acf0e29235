"""What any server is judged by: metrics, workloads, limits of the hardware, capacity, and time that can be simulated.

For whoever measures an engine, this one or another. It knows nothing of the course.
"""
