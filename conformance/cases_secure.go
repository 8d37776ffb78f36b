// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
)

// rules returns the rules of the driver's roles.
func (s *suite) rules() (rules []rbac.PolicyRule) {
	if len(s.config.RBAC) == 0 {
		s.skip("the driver's ClusterRoles are not known: set rbac")
	}
	for _, name := range s.config.RBAC {
		raw, err := os.ReadFile(name)
		s.must(err, "read rbac")
		d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(raw), 4096)
		for {
			var role rbac.ClusterRole
			if err := d.Decode(&role); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				s.fatal("rbac %s: %v", name, err)
			}
			if role.Kind == "ClusterRole" || role.Kind == "Role" {
				rules = append(rules, role.Rules...)
			}
		}
	}
	if len(rules) == 0 {
		s.fatal("rbac %v has no rules of a Role or ClusterRole", s.config.RBAC)
	}
	return rules
}

// writable are the resources that a driver may write, with their API groups.
func writable() []string {
	return []string{
		"resource.k8s.io/resourceslices", "resource.k8s.io/resourceclaims/status", "resource.k8s.io/resourceclaims/driver",
		"/events", "events.k8s.io/events",
	}
}

// ownGroup reports whether an API group is in a driver's domain: the driver's name, or its name without the first part,
// unless that leaves a top-level domain.
func ownGroup(driver, group string) bool {
	for _, domain := range []string{driver, afterDot(driver)} {
		if strings.Contains(domain, ".") && (group == domain || strings.HasSuffix(group, "."+domain)) {
			return !strings.HasSuffix(group, ".k8s.io") && !strings.HasSuffix(group, ".kubernetes.io")
		}
	}
	return false
}

func afterDot(name string) string {
	_, rest, _ := strings.Cut(name, ".")
	return rest
}

// checkRule returns an error if a rule grants a permission that a driver must not have.
func checkRule(driver string, rule rbac.PolicyRule) error {
	writes := slices.ContainsFunc(rule.Verbs, func(v string) bool {
		return !slices.Contains([]string{"get", "list", "watch"}, v)
	})
	if slices.Contains(slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs, rule.NonResourceURLs), "*") {
		return fmt.Errorf("a rule has a wildcard: %v %v %v %v", rule.APIGroups, rule.Resources, rule.NonResourceURLs,
			rule.Verbs)
	}
	for _, group := range rule.APIGroups {
		for _, r := range rule.Resources {
			switch {
			case group == "" && (r == "secrets" || r == "nodes/proxy" || strings.HasPrefix(r, "pods/")):
				return fmt.Errorf("a rule permits %v of %s", rule.Verbs, r)
			case writes && !slices.Contains(writable(), group+"/"+r) && !ownGroup(driver, group):
				return fmt.Errorf("a rule permits %v of %s in the API group %q; a driver may write only %v, and resources of API "+
					"groups in its domain", rule.Verbs, r, group, writable())
			}
		}
	}
	return nil
}

func caseRBAC(_ context.Context, s *suite) {
	for _, rule := range s.rules() {
		if err := checkRule(s.config.Driver, rule); err != nil {
			s.fatal("%v", err)
		}
	}
}

func caseStatusRBAC(_ context.Context, s *suite) {
	found := false
	for _, rule := range s.rules() {
		if !slices.Contains(rule.Resources, "resourceclaims/driver") {
			continue
		}
		for _, v := range rule.Verbs {
			if !strings.HasPrefix(v, "associated-node:") && !strings.HasPrefix(v, "arbitrary-node:") {
				s.fatal("a rule permits %q of resourceclaims/driver; its verbs are associated-node:... and arbitrary-node:...", v)
			}
			found = true
		}
	}
	if !found {
		s.fatal("no rule permits verbs of resourceclaims/driver, without which the driver cannot write status.devices")
	}
}

func caseBindingRBAC(_ context.Context, s *suite) {
	found := false
	for _, rule := range s.rules() {
		if slices.Contains(rule.Resources, "resourceclaims/binding") {
			s.fatal("a rule permits %v of resourceclaims/binding, which only the scheduler needs", rule.Verbs)
		}
		found = found || slices.Contains(rule.Resources, "resourceclaims/driver")
	}
	if !found {
		s.fatal("no rule permits verbs of resourceclaims/driver, without which the driver cannot write binding conditions")
	}
}

// Permissions of users other than the owner and the group of a file.
const othersRead, othersWrite = 0o004, 0o002

func caseFileModes(ctx context.Context, s *suite) {
	_, devices := s.prepared(ctx)
	mounted := s.mounted(devices)
	s.checkSockets(mounted)
	directories := []string{s.env.PluginDir, s.env.StateDir}
	if s.server != nil { // on a node, the directory also has the specs of other drivers
		directories = append(directories, s.env.CDIDir)
	}
	for _, dir := range directories {
		if dir != "" {
			s.checkModes(dir, mounted)
		}
	}
}

// checkSockets ends the case if users other than root can connect to a socket of the driver, or if containers of a
// claim can, because one of the mounted paths contains it.
func (s *suite) checkSockets(mounted []string) {
	i := s.main()
	for _, name := range []string{i.registration, i.endpoint} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		s.must(err, "look at a socket")
		parent, err := os.Stat(filepath.Dir(name))
		s.must(err, "look at the directory of a socket")
		// Connecting needs the permission to write. The suite's own directories are closed to others, so only the mode of the
		// socket counts there.
		closed := s.server == nil && parent.Mode().Perm()&0o001 == 0
		if info.Mode().Perm()&othersWrite != 0 && !closed {
			s.fatal("socket %s has the mode %v: every user can connect", name, info.Mode())
		}
	}
	for _, path := range mounted {
		for _, socket := range []string{i.registration, i.endpoint} {
			if socket == path || strings.HasPrefix(socket, strings.TrimSuffix(path, "/")+"/") {
				s.fatal("containers of the claim get %s, with socket %s", path, socket)
			}
		}
	}
}

// checkModes ends the case if users other than root can write a file of a directory, or read one with state of the
// driver. mounted are the paths that containers of a claim read.
func (s *suite) checkModes(dir string, mounted []string) {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type()&fs.ModeSymlink != 0 || slices.Contains(s.setUp, path) {
			return nil //nolint:nilerr // it was removed meanwhile
		}
		info, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // it was removed meanwhile
		}
		// Containers of all users read what is mounted into them. Directories, sockets, and lock files do not have contents.
		// Programs, such as a hook that the runtime runs, are not state.
		isProgram := info.Mode().Perm()&0o111 != 0
		private := d.Type().IsRegular() && info.Size() > 0 && !isProgram && !slices.Contains(mounted, path) &&
			dir != s.env.CDIDir // programs that list CDI devices read specs
		switch mode := info.Mode().Perm(); {
		case mode&othersWrite != 0:
			return fmt.Errorf("%s has the mode %v: every user can write it", path, info.Mode())
		case mode&othersRead != 0 && private:
			return fmt.Errorf("%s has the mode %v: every user can read it", path, info.Mode())
		}
		return nil
	})
	s.must(err, "look at the driver's files")
}

// mounted returns the files that the CDI edits of devices mount.
func (s *suite) mounted(devices []*dra.Device) (paths []string) {
	for _, e := range s.edits(cdiIDs(devices)) {
		for _, m := range e.Mounts {
			paths = append(paths, s.main().path(m.HostPath))
		}
	}
	return paths
}
