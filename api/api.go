// Package api holds what users and administrators write, one package per API
// group and version: the opaque parameters of a claim (v1alpha1) and the
// configuration of the driver (config/v1alpha1). Decoding, defaulting, merging
// and validation live beside the types, once, for every program that needs
// them: the node plugin refuses at prepare exactly what admission would refuse.
package api

// DriverName is the name under which the driver publishes devices, registers
// with the kubelet and finds its parameters in claims.
const DriverName = "dra-shared.dev"
