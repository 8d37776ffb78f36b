package netdev

// What the benchmark's floor is made of: the bare messages of an attach.
var (
	CreateRequest     = createRequest
	ConfigureRequests = configureRequests
	UpRequests        = upRequests
)
