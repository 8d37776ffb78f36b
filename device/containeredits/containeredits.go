// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package containeredits builds the container edits of a share: environment variables
// that report the grant, and the edits that an administrator configured.
package containeredits

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
)

// Variable returns the name of an environment variable that describes a share
// of a request, such as DRA_SHARED_NIC_BANDWIDTH_BITS_PER_SECOND.
func Variable(request, property string) string {
	return v1alpha1.EnvironmentPrefix + strings.ToUpper(
		strings.NewReplacer("-", "_", "/", "_", ".", "_").Replace(request+"_"+property),
	)
}

// GrantVariables returns the environment variables that report a grant: memory
// in bytes, every other capacity as a decimal number.
func GrantVariables(request string, grant map[string]resource.Quantity) map[string]string {
	variables := make(map[string]string, len(grant))
	for name, q := range grant {
		variables[Variable(request, config.GrantVariable(name))] = capacity.Decimal(q)
	}
	return variables
}

// Merge combines expanded edits from a configuration with other environment variables. If a variable is set more than
// once, the configuration wins, then the last of environments.
func Merge(expanded config.Edits, environments ...map[string]string) (edits cdi.Edits) {
	all := map[string]string{}
	for _, environment := range append(environments, expanded.Environment) {
		maps.Copy(all, environment)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		edits.Env = append(edits.Env, name+"="+all[name])
	}
	edits.DeviceNodes = expanded.DeviceNodes
	for _, m := range expanded.Mounts {
		edits.Mounts = append(edits.Mounts, cdi.Mount(m))
	}
	return edits
}

// Decode returns the edits that a kind has recorded in a share's parameters, as JSON.
func Decode(share string, recorded json.RawMessage) (edits cdi.Edits, err error) {
	if err = json.Unmarshal(recorded, &edits); err != nil {
		err = fmt.Errorf("recorded edits of share %s: %w", share, err)
	}
	return edits, err
}

// AdminAccess returns the edits for a request with admin access: the containers may observe the device but are not
// granted anything.
func AdminAccess(request string) cdi.Edits {
	return cdi.Edits{Env: []string{Variable(request, v1alpha1.EnvironmentAdminAccess) + "=true"}}
}

// Share identifies a share in the texts of configured edits.
type Share struct {
	Name    string // unique on the node
	Request string
	Device  string
	Node    string
}

// ShareVariables returns the variables that an administrator may use in the texts of configured edits for every
// device kind: those that identify the share, and those that report its grant. See config.Edits.
func ShareVariables(s Share, c config.Capacities, grant map[string]resource.Quantity) map[string]string {
	variables := amountVariables(c, grant)
	maps.Copy(variables, map[string]string{
		config.VariableShare: s.Name, config.VariableRequest: s.Request,
		config.VariableDevice: s.Device, config.VariableNode: s.Node,
	})
	return variables
}

// amountVariables returns a grant's variables: for each granted capacity, the names that config.Edits lists.
func amountVariables(c config.Capacities, grant map[string]resource.Quantity) map[string]string {
	variables := map[string]string{}
	for name, whole := range c.Capacity {
		q, ok := grant[name]
		if !ok {
			continue // the capacity was not configured when the share was allocated
		}
		variables[name] = capacity.Decimal(q)
		for suffix, unit := range map[string]int64{".Ki": 1 << 10, ".Mi": 1 << 20, ".Gi": 1 << 30} {
			variables[name+suffix] = fmt.Sprint(q.Value() / unit)
		}
		percent := 100 * q.AsApproximateFloat64() / whole.AsApproximateFloat64()
		variables[name+".percent"] = fmt.Sprint(int64(math.Floor(percent + 1e-9)))
	}
	return variables
}
